"""What to run at which load: estimates of acceptance and step time, and the shape of every row of the plan. Pure."""
