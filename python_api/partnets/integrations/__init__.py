"""Partitioned models in the training loops of other libraries, which must be installed: lightning, hugging_face."""
