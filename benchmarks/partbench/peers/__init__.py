"""The measured layers with their tensors, the models, and the alternative implementations of partitioned ones."""
