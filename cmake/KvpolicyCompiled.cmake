# SPDX-License-Identifier: Apache-2.0
#
# kvpolicy::compiled is a library, static or shared as BUILD_SHARED_LIBS says. Each file of compiled/
# has the engine for one instruction set. All other code in these files, the standard library's
# functions included, is compiled for every processor of the architecture, because a linker keeps one
# copy of such a function for the whole program.
set(folder "${PROJECT_SOURCE_DIR}/compiled")
set(KVPOLICY_COMPILED_X86 FALSE)
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(KVPOLICY_COMPILED_X86 TRUE)
endif()

set(sources "${folder}/engine.cpp" "${folder}/baseline.cpp")
set(libs hwy::hwy)
if(KVPOLICY_ENABLE_SANITIZERS AND KVPOLICY_BUILD_TESTS AND NOT BUILD_SHARED_LIBS)
  # Sanitizers look at the library on this machine alone, which has these policies for its programs already.
  list(APPEND libs $<BUILD_INTERFACE:$<LINK_ONLY:kvpolicy_program_policies>>)
else()
  foreach(element float float16 bfloat16)
    list(APPEND sources "${folder}/policies_${element}.cpp")
  endforeach()
endif()
if(KVPOLICY_COMPILED_X86)
  list(APPEND sources "${folder}/sse4.cpp" "${folder}/avx2.cpp" "${folder}/avx512.cpp")
endif()
# The cache, plans from files, and the C interface.
if(TARGET nlohmann_json::nlohmann_json)
  set(KVPOLICY_COMPILED_CACHE TRUE)
  foreach(source cache_float cache_float16 cache_bfloat16 c)
    list(APPEND sources "${folder}/${source}.cpp")
  endforeach()
  list(APPEND libs $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
else()
  message(STATUS "kvpolicy: nlohmann_json is missing (nlohmann-json3-dev): kvpolicy::compiled has the "
                 "engine alone, without caches, plan files and the C interface")
endif()
find_package(OpenMP QUIET COMPONENTS CXX)
set(KVPOLICY_COMPILED_OPENMP ${OpenMP_CXX_FOUND})
set(KVPOLICY_COMPILED_ASKS_OPENMP FALSE)
if(OpenMP_CXX_FOUND)
  list(APPEND libs OpenMP::OpenMP_CXX)
  if(NOT BUILD_SHARED_LIBS)
    set(KVPOLICY_COMPILED_ASKS_OPENMP TRUE)
  endif()
endif()
kvpolicy_add_component(compiled SOURCES ${sources} PRIVATE_LIBS ${libs})
# The C interface grows from version to version; before 1.0 a minor version may break it.
set_target_properties(kvpolicy_compiled PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
# An engine without optimisation is of no use to anyone, and projects often name no build type.
get_property(several_configurations GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT CMAKE_BUILD_TYPE AND NOT several_configurations AND NOT MSVC)
  target_compile_options(kvpolicy_compiled PRIVATE -O2)
endif()
target_include_directories(kvpolicy_compiled PRIVATE "${folder}")
# Policies are compiled by policies_*.cpp alone.
target_compile_definitions(kvpolicy_compiled PRIVATE KVPOLICY_SEPARATE_COMPILATION)
if(KVPOLICY_COMPILED_X86)
  target_compile_definitions(kvpolicy_compiled PRIVATE KVPOLICY_COMPILED_X86)
  # Comes after CMAKE_CXX_FLAGS, whose -march=native it replaces.
  target_compile_options(kvpolicy_compiled PRIVATE -march=x86-64 -mtune=generic)
endif()
