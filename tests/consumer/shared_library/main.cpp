// SPDX-License-Identifier: Apache-2.0
//
// The program: both units of the library give the results of the plain engine here, a cache is passed from
// the library to the program, and an error of the library is caught by its type.
#include <cmath>
#include <cstdio>

#include "engine.hpp"

namespace {

bool equal(const std::vector<float>& expected, const own::Attended& attended) {
  bool close = attended.out.size() == expected.size();
  float worst = 0;
  for (std::size_t i = 0; close && i < expected.size(); ++i) {
    const float error = std::abs(attended.out[i] - expected[i]);
    close = error <= 1e-5F;  // is false for NaN
    worst = std::fmax(worst, error);
  }
  std::printf("%s: %s, error up to %g\n", attended.instruction_set.c_str(), close ? "right" : "wrong",
              static_cast<double>(worst));
  return close;
}

}  // namespace

int main() {
  kvpolicy::DuoCache<float> here{own::plan()};
  const std::vector<float> expected = own::run(here);
  // The baseline unit is called before and after the other one, which must not change its results.
  const own::Attended baseline = own::attend_baseline();
  const own::Attended native = own::attend_native();
  bool right = equal(expected, baseline) && equal(expected, native);
  right = equal(expected, own::attend_baseline()) && right;
#ifdef DIFFERENT_INSTRUCTION_SETS
  if (baseline.instruction_set == native.instruction_set) {
    std::printf("both units were compiled for %s\n", native.instruction_set.c_str());
    right = false;
  }
#endif

  kvpolicy::DuoCache<float> theirs = own::made_by_library();
  if (own::run(theirs) != expected || theirs.bytes() != here.bytes()) {
    std::printf("a cache that the library made is another one\n");
    right = false;
  }
  using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<float>>;
  if (!(theirs.plan() == here.plan()) || !theirs.plan().has<Full>(0, 0) ||
      theirs.policy<Full>(0, 0).rows() != own::tokens) {
    std::printf("a policy that the library made is another one\n");
    right = false;
  }
  try {
    own::refuse();
    std::printf("nothing was thrown\n");
    right = false;
  } catch (const kvpolicy::RollbackError& error) {
    std::printf("caught: %s\n", error.what());
  }
  return right ? 0 : 1;
}
