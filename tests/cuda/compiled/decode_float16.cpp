// SPDX-License-Identifier: Apache-2.0
#include "cuda/support/decode_trial.hpp"

namespace test::decode {
KVPOLICY_DECODE_PACKED(template, float16)
}
