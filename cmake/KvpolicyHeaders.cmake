# SPDX-License-Identifier: Apache-2.0
#
# Decides which public header belongs to which component, and makes the targets that own them.
#
# A component named X beyond `kvpolicy` owns include/kvpolicy/X.hpp, include/kvpolicy/X/** and
# kernels/kvpolicy/X/**; everything else is `kvpolicy` and needs only the standard library.

set(KVPOLICY_COMPONENTS kvpolicy io cpu cuda format compiled)

# kvpolicy_headers(<out> <component>): the component's headers, as full paths.
function(kvpolicy_headers out component)
  file(GLOB_RECURSE all CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/kvpolicy/*.hpp"
       "${PROJECT_SOURCE_DIR}/kernels/kvpolicy/*.cuh")
  if(component STREQUAL kvpolicy)
    set(others ${KVPOLICY_COMPONENTS})
    list(REMOVE_ITEM others kvpolicy)
    list(JOIN others "|" names)
    list(FILTER all EXCLUDE REGEX "/(include|kernels)/kvpolicy/(${names})(/|\\.hpp$)")
  else()
    list(FILTER all INCLUDE REGEX "/(include|kernels)/kvpolicy/${component}(/|\\.hpp$)")
  endif()
  if(component STREQUAL compiled)
    list(APPEND all "${PROJECT_SOURCE_DIR}/include/kvpolicy/c.h")
  endif()
  set(${out} ${all} PARENT_SCOPE)
endfunction()

# kvpolicy_add_component(<component> [LIBS targets...] [SOURCES files...] [PRIVATE_LIBS targets...]):
# makes kvpolicy::<component>, a compiled library if it has sources. `include` and `kernels` are two
# roots here and one folder in an installation.
function(kvpolicy_add_component component)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LIBS;SOURCES;PRIVATE_LIBS")
  set(target kvpolicy)
  if(NOT component STREQUAL kvpolicy)
    set(target kvpolicy_${component})
    list(PREPEND arg_LIBS kvpolicy::kvpolicy)
  endif()
  kvpolicy_headers(headers ${component})
  set(roots "${PROJECT_SOURCE_DIR}/include")
  if(EXISTS "${PROJECT_SOURCE_DIR}/kernels")
    list(APPEND roots "${PROJECT_SOURCE_DIR}/kernels")
  endif()

  set(scope INTERFACE)
  if(arg_SOURCES)
    set(scope PUBLIC)
    add_library(${target} ${arg_SOURCES})
    target_link_libraries(${target} PRIVATE ${arg_PRIVATE_LIBS})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF)
  else()
    add_library(${target} INTERFACE)
  endif()
  add_library(kvpolicy::${component} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${component})
  target_compile_features(${target} ${scope} cxx_std_20)
  target_link_libraries(${target} ${scope} ${arg_LIBS})
  target_sources(${target} ${scope} FILE_SET HEADERS BASE_DIRS ${roots} FILES ${headers})
endfunction()
