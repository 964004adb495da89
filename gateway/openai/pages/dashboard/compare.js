// Continuous beside static.
