"""The live core at a terminal, and the time of a request: `kaiten top`, `watch`, `explain` …"""
