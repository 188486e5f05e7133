// SPDX-License-Identifier: Apache-2.0
//
// Writes a recording as one HTML page that needs no network and no other file. page/page.html is
// its frame. page/page.css and the scripts are inserted when the tool is built. The recording is
// inserted when the page is written: JSON with one string of bytes, whose layout page.cpp
// describes.
#pragma once

#include <cstddef>
#include <string>

#include "recording.hpp"

namespace kvpolicy::tools {

struct HtmlPage {
  std::string html;
  float least_shown = 0;  ///< attention below this share of a query's attention is not in the page
};

/// Attention takes the most space, because it grows with heads, steps and rows. Its smallest shares
/// are left out until the page has no more than `most_bytes`; the rest may still exceed that.
[[nodiscard]] HtmlPage write_page(const Recording& recording, std::size_t most_bytes = 1'900'000);

/// The name of a head's policy, and the bits of its quantised keys and values, 0 where there are none.
struct ShownPolicy {
  std::string policy;
  std::size_t key_bits = 0;
  std::size_t value_bits = 0;
  friend bool operator==(const ShownPolicy&, const ShownPolicy&) = default;
};
[[nodiscard]] ShownPolicy shown_policy(const HeadSettings<bfloat16>& config);

}  // namespace kvpolicy::tools
