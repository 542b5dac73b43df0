"""Configurations of some settings over tiny ones."""

from shoal.config.load import validate
from tests.train.ranks import tiny_config


def config_of(data, settings, advice=None):
    values = tiny_config(data, **settings)
    for section, fields in (advice or {}).items():
        values[section] = {**values.get(section, {}), **fields}
    return validate(values, "test")
