// SPDX-License-Identifier: Apache-2.0
//
// A policy that works in a cache but says nothing about how it is saved.
// expect: to save or load a cache, each policy of its plan needs a `name`
#include <sstream>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  void serialize() {}  // none that takes an archive
};

int main() {
  const kvpolicy::KvCache cache{kvpolicy::uniform_plan<Own>({1, 1, 1, 64})};
  std::ostringstream stream;
  kvpolicy::save(cache, stream);
}
