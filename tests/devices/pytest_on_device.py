"""A plugin: ``pytest -p pytest_on_device tests/test_gpu.py`` runs on the pretend device."""

import pretend_device

pretend_device.install()
