// SPDX-License-Identifier: Apache-2.0
#include "program_engine.hpp"

KVPOLICY_PROGRAM_CACHE(template, float)
KVPOLICY_PROGRAM_CACHE(template, kvpolicy::bfloat16)
