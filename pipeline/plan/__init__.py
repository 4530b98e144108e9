"""The plan of a job: order, steps, needs and state. All of it is pure, but for `world`."""
