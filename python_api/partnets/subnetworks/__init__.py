"""Subnetworks: how a model's parameters are partitioned, and which of them are active."""
