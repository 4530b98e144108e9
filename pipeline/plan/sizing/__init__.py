"""Sizing: what a job's input side will do on given hardware, before any of it is rented. Pure."""
