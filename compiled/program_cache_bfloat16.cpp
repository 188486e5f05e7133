// SPDX-License-Identifier: Apache-2.0
#include "program_engine.hpp"

namespace kvpolicy {

KVPOLICY_CACHE_INSTANCE(template, bfloat16, cpu::Engine<>)

}  // namespace kvpolicy
