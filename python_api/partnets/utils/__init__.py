"""Utilities shared by several subpackages, without dependence on any of them."""
