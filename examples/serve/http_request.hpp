// SPDX-License-Identifier: Apache-2.0
//
// What of an HTTP request is refused before anybody looks at what it asks for, and how its body is read.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/api_error.hpp"

namespace httplib {
class ContentReader;
struct Request;
}  // namespace httplib

namespace kvpolicy::serve {

constexpr const char* completions_path = "/v1/completions";
constexpr const char* chat_completions_path = "/v1/chat/completions";

struct BodyLimits {
  std::size_t max_body = std::size_t{4} << 20;  ///< bytes
  int seconds_to_read = 30;                     ///< in which a body must have come
};

/// Names in a request's Host by which this machine alone can be meant.
[[nodiscard]] bool is_loopback(const std::string& host);

/// @throws ApiError for a body that no handler reads, an unclear length, and what a browser sends for another site's page: from an Origin
/// that is neither the Host nor one of `hosts`, or, `only_loopback`, to a Host that is not this machine's or one of `hosts`
void require_served(const httplib::Request& request, bool only_loopback,
                    const std::vector<std::string>& hosts);

/// A request's body, which counts among those that are on their way until it is destroyed.
class Body {
 public:
  explicit Body(std::atomic<std::size_t>& all) : all_{&all} {}
  Body(Body&& other) noexcept : all_{other.all_}, text_{std::exchange(other.text_, {})} {}
  Body& operator=(Body&&) = delete;
  ~Body() { *all_ -= text_.size(); }

  void append(std::string_view part) {
    text_ += part;
    *all_ += part.size();
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::atomic<std::size_t>* all_;
  std::string text_;
};

/// Reads bodies. Thread-safe.
class BodyReader {
 public:
  explicit BodyReader(const BodyLimits& limits) : limits_{limits} {}

  /// The library limits the time between two parts of a body, and a client that sends a byte now and then would have its thread for
  /// ever. A body in chunks or compressed would be parts of which nothing is seen here.
  /// @throws ApiError if the body is too long, does not come in time, or all that are on their way are more than `most_bytes`; or once
  /// `stopping`
  [[nodiscard]] Body read(const httplib::Request& request, const httplib::ContentReader& reader,
                          const std::atomic<bool>& stopping);

 private:
  /// Bytes of all bodies at once.
  [[nodiscard]] std::size_t most_bytes() const { return 32 * limits_.max_body; }

  BodyLimits limits_;
  std::atomic<std::size_t> bytes_ = 0;
};

}  // namespace kvpolicy::serve
