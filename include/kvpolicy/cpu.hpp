// SPDX-License-Identifier: Apache-2.0
//
// The KV cache with the fast CPU engine. Needs Highway (target kvpolicy::cpu). Compile for the instruction
// set of the machine it will run on (-march=native, -march=x86-64-v3); otherwise the engine uses only what
// every machine has.
#pragma once

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/separate.hpp>
#include <kvpolicy/cpu/engine.hpp>
#include <kvpolicy/cpu/huge_pages.hpp>

namespace kvpolicy::cpu {

/// The cache with the fast CPU engine. `cpu::KvCache<E, cpu::Engine<MyPool>>` runs on the caller's own
/// threads.
template <Element E, class CpuEngine = Engine<>>
using KvCache = kvpolicy::KvCache<E, CpuEngine>;

/// Many such caches in one call, with one parallel region a layer.
template <Element E, class CpuEngine = Engine<>>
using Batch = kvpolicy::Batch<E, CpuEngine>;

}  // namespace kvpolicy::cpu

namespace kvpolicy {

/// The caches over it; SPEC is `template` or `extern template` (kvpolicy/cpu/instances.hpp).
#define KVPOLICY_CPU_CACHE_INSTANCE(SPEC, E) KVPOLICY_CACHE_INSTANCE(SPEC, E, cpu::Engine<>)
KVPOLICY_DECLARE_INSTANCES(KVPOLICY_CPU_CACHE_INSTANCE)

}  // namespace kvpolicy
