"""Pure tensor mathematics: no Lightning, no state."""
