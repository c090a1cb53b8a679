"""Recipes: published methods as settings and small parts on top of the library, never a loop of their own."""

from recipe import absent

absent.install()
