// SPDX-License-Identifier: Apache-2.0
//
// The number of retrieval heads in each layer of the attention patterns published with DuoAttention
// (arXiv:2410.10819), computed by kvpolicy::head_kinds at the paper's sparsity; and the same for
// any pattern file. Which heads of a layer these are does not matter to the time of one launch; for
// separate launches they are placed next to each other, as in the published code.
#pragma once

#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/duo_gates.hpp>

namespace kvpolicy::bench {

struct DuoLayers {
  std::string name;
  std::size_t kv_heads = 8;            ///< out of 32 query heads
  std::vector<std::size_t> retrieval;  ///< number of heads in each layer
};

[[nodiscard]] inline std::vector<DuoLayers> published_duo_layers() {
  return {
      {"Llama-3-8B-4194k", 8, {2, 1, 3, 0, 2, 5, 2, 4, 5, 3, 4, 4, 1, 6, 5, 5,
                               5, 6, 3, 3, 6, 4, 5, 5, 5, 5, 5, 6, 5, 5, 8, 0}},
      {"Llama-3-8B-1048k", 8, {1, 1, 3, 2, 2, 4, 2, 4, 6, 4, 5, 3, 2, 6, 5, 5,
                               5, 6, 3, 5, 6, 3, 3, 6, 4, 4, 3, 4, 6, 5, 8, 2}},
      {"Mistral-7B-v0.2", 8, {3, 4, 6, 2, 4, 1, 3, 3, 2, 5, 2, 5, 6, 1, 4, 4,
                              5, 2, 7, 5, 6, 4, 3, 3, 4, 4, 5, 3, 4, 7, 6, 5}},
      {"Llama-2-7B-32K", 32, {2,  10, 2, 5, 3,  4, 9,  8, 9,  5, 8,  10, 4, 6, 12, 9,
                              12, 10, 9, 6, 11, 8, 14, 5, 12, 8, 12, 3,  6, 6, 12, 16}},
  };
}

/// Reads a full_attention_heads.tsv, which has a line of gates for each layer.
/// @throws FormatError for any other file
[[nodiscard]] inline DuoLayers read_duo_layers(const std::string& path, double sparsity) {
  std::ifstream file{path};
  require<FormatError>(file.good(), path, ": cannot be read");
  std::vector<double> gates;
  std::size_t layers = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty()) continue;
    std::istringstream fields{line};
    for (double gate = 0.0; fields >> gate;) gates.push_back(gate);
    ++layers;
  }
  require<FormatError>(layers > 0 && gates.size() % layers == 0 && 32 % (gates.size() / layers) == 0, path,
                       ": has ", gates.size(), " numbers in ", layers,
                       " lines; must have a line for each layer, of gates for 32 or fewer KV heads");
  const std::size_t heads = gates.size() / layers;
  const HeadKinds kinds = head_kinds({layers, heads, gates}, sparsity);
  DuoLayers found{path, heads, std::vector<std::size_t>(layers)};
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (std::size_t head = 0; head < heads; ++head) {
      found.retrieval[layer] += kinds(layer, head) == HeadKind::retrieval ? 1U : 0U;
    }
  }
  // The name of the model is that of the folder, if there is one.
  const std::size_t end = path.find_last_of('/');
  if (end != std::string::npos && end > 0) {
    const std::size_t begin = path.find_last_of('/', end - 1);
    found.name = path.substr(begin == std::string::npos ? 0 : begin + 1,
                             end - (begin == std::string::npos ? 0 : begin + 1));
  }
  return found;
}

}  // namespace kvpolicy::bench
