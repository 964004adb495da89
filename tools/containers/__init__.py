"""Images and the compose file on whichever container engine this machine has."""
