"""Fixtures of the tests of image folders."""

import pytest
from photo_folders import make_photos

photos = pytest.fixture(make_photos)
