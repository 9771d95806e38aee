"""A training step partitioned over the ranks of a job: any partition, not only a chain."""
