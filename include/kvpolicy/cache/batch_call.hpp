// SPDX-License-Identifier: Apache-2.0
//
// What batched calls on the host and on a device have in common (cache/batch.hpp, cuda/batch.hpp): the list of
// sequences, the ragged tensors, and the sequences that were left out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/try.hpp>

namespace kvpolicy {

/// One sequence of a batch.
template <class Cache>
struct BatchSequence {
  Cache* cache = nullptr;
  /// Options for the tokens of this sequence: `log_sum_exp` is [tokens of the sequence, q_heads], and
  /// `selection_query` counts from its first token.
  AttendOptions options = {};
};

/// A sequence that a call left out, because memory for it could not be obtained. Its cache is as before the call.
struct LeftOut {
  std::size_t sequence;
  std::exception_ptr error;  ///< std::bad_alloc or StorageError
};

namespace detail {

/// The part of a ragged tensor that belongs to one sequence.
template <class Tensor>
[[nodiscard]] Tensor part_of(const Tensor& tensor, std::span<const std::int32_t> indptr,
                             std::size_t sequence) {
  const auto first = static_cast<std::size_t>(indptr[sequence]);
  Tensor own = tensor;
  own.tokens = static_cast<std::size_t>(indptr[sequence + 1]) - first;
  if (own.tokens > 0 && own.data != nullptr) own.data = tensor.row(first, 0);
  return own;
}

/// Checks a ragged tensor as a whole. Whether it fits a layer is checked sequence by sequence.
/// @throws ShapeError
template <class Tensor>
void check_whole(const char* name, const Tensor& tensor, std::size_t tokens) {
  require<ShapeError>(tensor.tokens == tokens, "Batch: ", name, " has ", tensor.tokens,
                      " tokens, must have as many as the first tensor, ", tokens);
  check_tensor(name, tensor, tokens, tensor.heads, tensor.head_dim);
}

/// Checks the sequences of a call whose tensors have `tokens` tokens. `caches` is scratch memory.
/// @throws ShapeError for an indptr that does not fit, ConfigError for a cache that is missing or listed twice
template <class Cache>
void check_sequences(const char* call, std::span<const BatchSequence<Cache>> sequences,
                     std::span<const std::int32_t> indptr, std::size_t tokens, std::vector<Cache*>& caches) {
  require<ShapeError>(indptr.size() == sequences.size() + 1, "Batch::", call, ": indptr has ", indptr.size(),
                      " entries, must have one more than the ", sequences.size(), " sequences");
  require<ShapeError>(indptr.front() == 0 && std::cmp_equal(indptr.back(), tokens), "Batch::", call,
                      ": indptr is from ", indptr.front(), " to ", indptr.back(), ", must be from 0 to the ",
                      tokens, " tokens of the tensors");
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    require<ShapeError>(indptr[i] <= indptr[i + 1], "Batch::", call, ": sequence ", i, ": indptr falls from ",
                        indptr[i], " to ", indptr[i + 1], ", must not fall");
    require(sequences[i].cache != nullptr, "Batch::", call, ": sequence ", i, " has no cache");
  }
  caches.clear();
  for (const BatchSequence<Cache>& sequence : sequences) caches.push_back(sequence.cache);
  std::ranges::sort(caches, std::less{});
  require(std::ranges::adjacent_find(caches) == caches.end(), "Batch::", call,
          ": a cache is listed twice, each sequence must have its own");
}

/// Calls begin(i) for each of `count` sequences. A sequence that cannot obtain its memory is added to `left_out`,
/// which must have room for all. After any other error `abandon()` is called, and the error names the sequence; an
/// exception of a type that is not the library's becomes an Error.
template <class Begin, class Abandon>
void begin_each(std::size_t count, std::vector<LeftOut>& left_out, Begin begin, Abandon abandon) {
  const auto leave_out = [&](std::size_t i) { left_out.push_back({i, std::current_exception()}); };
  const auto give_up = [&]<class Error>(std::size_t i, const Error& error) {
    abandon();
    fail<Error>("Batch: sequence ", i, ": ", error.what());
  };
  for (std::size_t i = 0; i < count; ++i) {
    KVPOLICY_TRY { begin(i); }
    KVPOLICY_CATCH_AS(std::bad_alloc, no_memory) {
      static_cast<void>(no_memory);
      leave_out(i);
    }
    KVPOLICY_CATCH_AS(StorageError, unreadable) {
      static_cast<void>(unreadable);
      leave_out(i);
    }
    KVPOLICY_CATCH_AS(ShapeError, shape) { give_up(i, shape); }
    KVPOLICY_CATCH_AS(CapacityError, capacity) { give_up(i, capacity); }
    KVPOLICY_CATCH_AS(CaptureError, capture) { give_up(i, capture); }
    KVPOLICY_CATCH_AS(RollbackError, rollback) { give_up(i, rollback); }
    KVPOLICY_CATCH_AS(ConfigError, config) { give_up(i, config); }
    KVPOLICY_CATCH_AS(DeviceError, device) { give_up(i, device); }
    KVPOLICY_CATCH_AS(std::exception, other) { give_up(i, Error{other.what()}); }
    KVPOLICY_CATCH_ALL {
      abandon();
      KVPOLICY_RETHROW;
    }
  }
}

}  // namespace detail
}  // namespace kvpolicy
