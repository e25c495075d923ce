"""Tool calls out of an answer's text, as it arrives: a parser for each way in which models write them."""
