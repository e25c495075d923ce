module specdecode/pause

go 1.26
