"""Leaving the device to others for a while."""
