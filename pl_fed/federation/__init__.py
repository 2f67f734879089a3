"""The federation: its checked arguments, and the set-up of a session with algorithm and data."""

from pl_fed.federation.federation import Federation as Federation
