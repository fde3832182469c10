"""What is measured and against what: a layer and its tensors, models, and the ways to write a partitioned one."""
