"""The plan of a job: order, steps, needs and state. Pure but for `world`, which reads its launcher."""
