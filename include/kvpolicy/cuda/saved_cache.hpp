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

namespace kvpolicy::cuda {

/// Writes all that a cache holds, as kvpolicy::save does. Waits for the stream.
/// @throws as kvpolicy::save; CapacityError inside a capture, std::bad_alloc, DeviceError
template <Element E>
void save(const KvCache<E>& cache, std::ostream& out, std::string_view tag = {}, cudaStream_t stream = nullptr) {
  kvpolicy::save(HostCopies<E>::to_host(cache, "save", stream), out, tag);
}
/// The same to a file, which is replaced as a whole.
template <Element E>
void save(const KvCache<E>& cache, const std::filesystem::path& path, std::string_view tag = {},
          cudaStream_t stream = nullptr) {
  kvpolicy::save(HostCopies<E>::to_host(cache, "save", stream), path, tag);
}

namespace detail {

template <Element E, class Source>
void load_from(KvCache<E>& cache, Source& source, std::string_view tag, cudaStream_t stream) {
  kvpolicy::KvCache<E> host{cache.plan(), HostCopies<E>::host_options(cache.options())};
  kvpolicy::load(host, source, tag);
  cache = to_device(host, cache.options(), stream, cache.engine());
}

}  // namespace detail

/// The cache becomes what was saved, on the host or on a device, as kvpolicy::load has it: same tokens, rows,
/// selections, commit points. Graphs that were captured before must be captured again. The quantised rows of
/// a file of the host's: see `to_device`. Waits for the stream.
/// @throws as kvpolicy::load; CapacityError inside a capture, std::bad_alloc, DeviceError; the cache is then as
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

}  // namespace kvpolicy::cuda
