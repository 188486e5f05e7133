// SPDX-License-Identifier: Apache-2.0
#include "program_engine.hpp"

KVPOLICY_PROGRAM_CACHE(template, kvpolicy::half)
