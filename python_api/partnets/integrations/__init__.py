"""Partitioned models in training loops of other libraries, which must be installed: lightning, hugging_face."""
