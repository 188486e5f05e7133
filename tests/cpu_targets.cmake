# SPDX-License-Identifier: Apache-2.0
#
# The CPU engine is compiled for what the compiler's flags name, and its tests run on that. On the rota of scripts/test
# they run for older x86 as well: plain x86-64, where Highway 1.0 has no vectors, x86-64-v2 (SSE4) and x86-64-v3 (AVX2);
# each prints the name of Highway's target that it ran. Whole caches (cache_test, shapes_test, engine_memory_test),
# threads and where memory comes from are the same on all of them.
set(KVPOLICY_TEST_CPU_TARGETS "" CACHE STRING
    "Older x86 that the CPU engine is tested for besides: x86-64, x86-64-v2, x86-64-v3")
if(NOT TARGET test_cpu OR KVPOLICY_ENABLE_SANITIZERS OR MSVC
   OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  return()
endif()

include(CheckCXXCompilerFlag)
include(CheckCXXSourceRuns)

# kvpolicy_add_cpu_target(<name> <feature that the machine must have> <flags>...)
function(kvpolicy_add_cpu_target name feature)
  check_cxx_source_runs("int main() { return __builtin_cpu_supports(\"${feature}\") ? 0 : 1; }"
                        KVPOLICY_RUNS_${feature})
  if(NOT KVPOLICY_RUNS_${feature})
    message(STATUS "kvpolicy: not testing the CPU engine for ${name}: this machine has no ${feature}")
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cpu/*_test.cpp")
  list(FILTER sources EXCLUDE REGEX "/(cache|engine_memory|huge_pages|parallel|shapes)_test.cpp$")
  set(target test_cpu_${name})
  kvpolicy_batches(sources cpu_${name} ${sources})
  kvpolicy_add_program(${target} SOURCES ${sources}
                       LIBS kvpolicy_test_support kvpolicy::cpu kvpolicy_openmp)
  # Behind CMAKE_CXX_FLAGS, whose -march=native they replace.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1> ${ARGN})
  add_test(NAME cpu.${name} COMMAND ${target})
  set_tests_properties(cpu.${name} PROPERTIES
    LABELS cpu TIMEOUT 1200 FAIL_REGULAR_EXPRESSION "test cases: +0 ")
endfunction()

set(feature_of_x86-64 sse2)
set(feature_of_x86-64-v2 sse4.2)
set(feature_of_x86-64-v3 avx2)
foreach(name IN LISTS KVPOLICY_TEST_CPU_TARGETS)
  if(NOT feature_of_${name})
    message(FATAL_ERROR "kvpolicy: KVPOLICY_TEST_CPU_TARGETS has '${name}'; there are x86-64, x86-64-v2 and x86-64-v3")
  endif()
  kvpolicy_add_cpu_target(${name} ${feature_of_${name}} -march=${name})
endforeach()

# Compiled, and nowhere run: for processors with AMX, with which Highway 1.0 takes its AVX3_DL. Most
# machines that tests run on have neither.
check_cxx_compiler_flag(-march=sapphirerapids KVPOLICY_HAS_SAPPHIRERAPIDS)
if(KVPOLICY_HAS_SAPPHIRERAPIDS)
  add_library(cpu_for_sapphirerapids OBJECT cpu/engine_test.cpp)
  target_link_libraries(cpu_for_sapphirerapids PRIVATE kvpolicy_test_support kvpolicy::cpu)
  target_compile_features(cpu_for_sapphirerapids PRIVATE cxx_std_20)
  target_compile_options(cpu_for_sapphirerapids PRIVATE -O0 -march=sapphirerapids)
endif()
