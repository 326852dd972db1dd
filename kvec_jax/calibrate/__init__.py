"""Measuring on held-out text what a method must know of a model beforehand."""
