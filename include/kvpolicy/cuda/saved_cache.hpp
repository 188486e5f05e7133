// SPDX-License-Identifier: Apache-2.0
//
// A device cache in a file or stream, in the format of the host's (cache/saved_cache.hpp): a file that was
// saved on one opens on the other. The rows pass through a cache of the host, so saving and loading take as
// much host memory as the cache holds.
#pragma once

#include <filesystem>
#include <istream>
#include <ostream>
#include <string_view>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/cuda/host_copy.hpp>

namespace kvpolicy::gpu {

namespace detail {

template <Element E, class Target>
void save_to(const KvCache<E>& cache, Target& target, std::string_view tag, cudaStream_t stream) {
  HostPages pages{HostCopies<E>::pool_of(cache), cache.bytes(), cache.plan().shape().kv_head_count()};
  const UnreadOutputs outputs{cache.plan().shape()};
  kvpolicy::save(HostCopies<E>::to_host(cache, "save", stream, pages.pool(), outputs.get()), target, tag);
}

template <Element E, class Source>
void load_from(KvCache<E>& cache, Source& source, std::string_view tag, cudaStream_t stream) {
  // A text that fits the device takes pages that are free there.
  const PagePool* pool = HostCopies<E>::pool_of(cache);
  const std::size_t free = pool == nullptr ? 0 : pool->obtained_bytes() - pool->live_bytes();
  HostPages pages{pool, free, cache.plan().shape().kv_head_count()};
  const UnreadOutputs outputs{cache.plan().shape()};
  kvpolicy::KvCache<E> host{cache.plan(),
                            HostCopies<E>::host_options(cache.options(), pages.pool(), outputs.get())};
  kvpolicy::load(host, source, tag);
  cache = to_device(host, cache.options(), stream, cache.engine());
}

}  // namespace detail

/// Writes all that a cache holds, as kvpolicy::save does. Where heads lie in an engine's pages, all must, and
/// none may choose chunks, as on the host. Waits for the stream.
/// @throws as kvpolicy::save; CaptureError inside a capture, std::bad_alloc, DeviceError
template <Element E>
void save(const KvCache<E>& cache, std::ostream& out, std::string_view tag = {},
          cudaStream_t stream = nullptr) {
  detail::save_to(cache, out, tag, stream);
}
/// The same to a file, which is replaced as a whole.
template <Element E>
void save(const KvCache<E>& cache, const std::filesystem::path& path, std::string_view tag = {},
          cudaStream_t stream = nullptr) {
  detail::save_to(cache, path, tag, stream);
}

/// The cache becomes what was saved, on the host or on a device, as kvpolicy::load has it: same tokens, rows,
/// selections, commit points. Graphs that were captured before must be captured again. The quantised rows of
/// a file of the host's: see `to_device`. Waits for the stream.
/// @throws as kvpolicy::load; CaptureError inside a capture, std::bad_alloc, DeviceError; the cache is then as
/// it was
template <Element E>
void load(KvCache<E>& cache, std::istream& in, std::string_view tag = {}, cudaStream_t stream = nullptr) {
  detail::load_from(cache, in, tag, stream);
}
/// The same from a file, in which nothing else may stand.
template <Element E>
void load(KvCache<E>& cache, const std::filesystem::path& path, std::string_view tag = {},
          cudaStream_t stream = nullptr) {
  detail::load_from(cache, path, tag, stream);
}

}  // namespace kvpolicy::gpu
