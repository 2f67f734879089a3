"""Nets as flat rows of parameters, functional calls, keyed dropout, and modes."""
