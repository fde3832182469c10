"""Clients whose digits are rotated learn, together and without showing them, to rotate what they train on."""
