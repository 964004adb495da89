"""The decisions. Standard library only; time is an argument."""
