# SPDX-License-Identifier: Apache-2.0
"""The part of docs/not_yet_measured.md that becomes shorter with each run on a GPU."""
from . import gpu_tables

TABLES = {"gpu_open": (gpu_tables.PARTS, gpu_tables.gpu_open)}
