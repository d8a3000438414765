"""Pipeline parallelism: stages, schedules, and the executor."""
