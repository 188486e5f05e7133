// SPDX-License-Identifier: Apache-2.0
#include "program_engine.hpp"

namespace kvpolicy {

KVPOLICY_CACHE_INSTANCE(template, float, cpu::Engine<>)
KVPOLICY_CACHE_INSTANCE(template, half, cpu::Engine<>)

}  // namespace kvpolicy
