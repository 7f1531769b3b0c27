"""Loads the environment."""

from verifiers.v1 import Environment


def resolve_env_config(config):
    return config


def load_environment(config):
    return Environment(config)
