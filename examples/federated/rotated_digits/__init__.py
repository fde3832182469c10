"""A federated app: clients with rotated digits learn a rotation augmentation without sharing their images."""
