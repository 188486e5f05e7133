// SPDX-License-Identifier: Apache-2.0
//
// The device cache, its engine with all kernels, and the models that most tests drive beside it: declared
// here and compiled once, by float16.cpp and bfloat16.cpp.
#pragma once

#include <kvpolicy/cuda.hpp>

#include "cache/random_operations.hpp"
#include "cuda/support/device_backend.hpp"

/// SPEC is `template` or `extern template`.
#define KVPOLICY_DEVICE_CACHE(SPEC, E)  \
  SPEC class kvpolicy::gpu::Engine<E>;  \
  SPEC class kvpolicy::gpu::KvCache<E>; \
  SPEC class test::Sequence<E, test::DeviceBackend<E>>;

KVPOLICY_DEVICE_CACHE(extern template, kvpolicy::float16)
KVPOLICY_DEVICE_CACHE(extern template, kvpolicy::bfloat16)
