# SPDX-License-Identifier: Apache-2.0
#
# Runs the portfile.cmake of a port without vcpkg's tool, which is a download. The helper functions are
# stand-ins that do the same with our files as vcpkg's functions and report the same errors; the result is
# checked as vcpkg checks it after a build.
#
#   cmake -DPORT_DIR=... -DFEATURES="cpu io" -DPACKAGES_DIR=... -DBUILD_DIR=... -P run_port.cmake
cmake_minimum_required(VERSION 3.25)
separate_arguments(FEATURES UNIX_COMMAND "${FEATURES}")
list(INSERT FEATURES 0 core)
set(PORT kvpolicy)
set(TARGET_TRIPLET x64-linux)
set(CURRENT_PORT_DIR "${PORT_DIR}")
set(CURRENT_PACKAGES_DIR "${PACKAGES_DIR}")
set(CURRENT_BUILDTREES_DIR "${BUILD_DIR}")

# Every feature is declared, and the version is that of the headers.
file(READ "${PORT_DIR}/vcpkg.json" manifest)
string(JSON VERSION GET "${manifest}" version)
foreach(feature IN LISTS FEATURES)
  if(NOT feature STREQUAL core)
    string(JSON ignored GET "${manifest}" features ${feature} description)
  endif()
endforeach()

function(vcpkg_check_features)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "OUT_FEATURE_OPTIONS;PREFIX" "FEATURES;INVERTED_FEATURES")
  if(NOT DEFINED arg_OUT_FEATURE_OPTIONS OR DEFINED arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "vcpkg_check_features: missing or unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  set(options "")
  set(variables "")
  foreach(kind FEATURES INVERTED_FEATURES)
    set(pairs ${arg_${kind}})
    while(pairs)
      list(POP_FRONT pairs feature variable)
      if(NOT variable OR variable IN_LIST variables)
        message(FATAL_ERROR "vcpkg_check_features: feature '${feature}' has the variable "
                            "'${variable}', which is missing or given twice")
      endif()
      list(APPEND variables ${variable})
      set(value OFF)
      if((feature IN_LIST FEATURES AND kind STREQUAL FEATURES) OR
         (NOT feature IN_LIST FEATURES AND kind STREQUAL INVERTED_FEATURES))
        set(value ON)
      endif()
      list(APPEND options "-D${variable}=${value}")
    endwhile()
  endforeach()
  set(${arg_OUT_FEATURE_OPTIONS} ${options} PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS;MAYBE_UNUSED_VARIABLES")
  if(NOT DEFINED arg_SOURCE_PATH OR DEFINED arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "vcpkg_cmake_configure: missing or unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  file(REMOVE_RECURSE "${BUILD_DIR}" "${PACKAGES_DIR}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S "${arg_SOURCE_PATH}" -B "${BUILD_DIR}" -G Ninja
            -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=${PACKAGES_DIR}
            -DCMAKE_INSTALL_LIBDIR:STRING=lib -DCMAKE_INSTALL_BINDIR:STRING=bin
            -DCMAKE_ERROR_ON_ABSOLUTE_INSTALL_DESTINATION=ON ${arg_OPTIONS}
    ERROR_VARIABLE warnings COMMAND_ERROR_IS_FATAL ANY)
  # vcpkg reports this, too: an option that is never read is usually misspelt.
  foreach(option IN LISTS arg_OPTIONS)
    string(REGEX REPLACE "^-D([^:=]*).*$" "\\1" variable "${option}")
    if(warnings MATCHES "\n +${variable}\n" AND NOT variable IN_LIST arg_MAYBE_UNUSED_VARIABLES)
      message(FATAL_ERROR "the port sets ${variable}, which the project does not read")
    endif()
  endforeach()
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --build "${BUILD_DIR}" --target install
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Moves `CONFIG_PATH` to share/`PORT`, and shortens the path from there to the prefix.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "PACKAGE_NAME;CONFIG_PATH" "")
  if(DEFINED arg_UNPARSED_ARGUMENTS OR NOT VCPKG_BUILD_TYPE STREQUAL "release")
    message(FATAL_ERROR "vcpkg_cmake_config_fixup: unknown arguments ${arg_UNPARSED_ARGUMENTS}, or a "
                        "debug build is expected, too")
  endif()
  set(to "${PACKAGES_DIR}/share/${PORT}")
  file(GLOB files "${PACKAGES_DIR}/${arg_CONFIG_PATH}/*")
  file(COPY ${files} DESTINATION "${to}")
  file(REMOVE_RECURSE "${PACKAGES_DIR}/${arg_CONFIG_PATH}")
  cmake_path(GET arg_CONFIG_PATH PARENT_PATH parent)
  if(parent MATCHES "/cmake$")
    file(REMOVE_RECURSE "${PACKAGES_DIR}/${parent}")
  endif()
  file(GLOB files "${to}/*.cmake")
  foreach(file IN LISTS files)
    file(READ "${file}" text)
    string(REGEX REPLACE
[[get_filename_component\(_IMPORT_PREFIX "\${CMAKE_CURRENT_LIST_FILE}" PATH\)(
get_filename_component\(_IMPORT_PREFIX "\${_IMPORT_PREFIX}" PATH\))*]]
[[get_filename_component(_IMPORT_PREFIX "${CMAKE_CURRENT_LIST_FILE}" PATH)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)
get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)]]
      text "${text}")
    string(REGEX REPLACE
[[get_filename_component\(PACKAGE_PREFIX_DIR "\${CMAKE_CURRENT_LIST_DIR}/\.\./(\.\./)*" ABSOLUTE\)]]
[[get_filename_component(PACKAGE_PREFIX_DIR "${CMAKE_CURRENT_LIST_DIR}/../../" ABSOLUTE)]]
      text "${text}")
    string(REPLACE "${PACKAGES_DIR}" [[${_IMPORT_PREFIX}]] text "${text}")
    file(WRITE "${file}" "${text}")
  endforeach()
endfunction()

# Each .pc file must resolve, with the packages that it requires.
function(vcpkg_fixup_pkgconfig)
  find_program(PKG_CONFIG NAMES pkg-config pkgconf)
  if(NOT PKG_CONFIG)
    return()
  endif()
  set(ENV{PKG_CONFIG_PATH} "${PACKAGES_DIR}/share/pkgconfig:$ENV{PKG_CONFIG_PATH}")
  file(GLOB_RECURSE files "${PACKAGES_DIR}/*.pc")
  foreach(file IN LISTS files)
    cmake_path(GET file STEM LAST_ONLY name)
    execute_process(COMMAND ${PKG_CONFIG} --print-errors --exists ${name} COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "COMMENT" "FILE_LIST")
  file(INSTALL ${arg_FILE_LIST} DESTINATION "${PACKAGES_DIR}/share/${PORT}" RENAME copyright)
endfunction()

include("${PORT_DIR}/portfile.cmake")

# ---- the checks of vcpkg after a build --------------------------------------------------------
function(expect condition_holds what)
  if(NOT condition_holds)
    message(FATAL_ERROR "vcpkg would refuse the package: ${what}")
  endif()
endfunction()

foreach(file copyright usage kvpolicyConfig.cmake kvpolicyConfigVersion.cmake)
  if(NOT EXISTS "${PACKAGES_DIR}/share/kvpolicy/${file}")
    expect(FALSE "share/kvpolicy/${file} is missing")
  endif()
endforeach()
foreach(folder debug lib bin share/cmake share/doc cmake)
  if(EXISTS "${PACKAGES_DIR}/${folder}")
    expect(FALSE "there is a folder ${folder}")
  endif()
endforeach()
file(GLOB_RECURSE folders LIST_DIRECTORIES true "${PACKAGES_DIR}/*")
foreach(folder IN LISTS folders)
  if(IS_DIRECTORY "${folder}")
    file(GLOB inside "${folder}/*")
    if(NOT inside)
      expect(FALSE "the folder ${folder} is empty")
    endif()
  else()
    file(READ "${folder}" text)
    foreach(place "${PACKAGES_DIR}" "${BUILD_DIR}" "${SOURCE_PATH}")
      string(FIND "${text}" "${place}" found)
      if(NOT found EQUAL -1)
        expect(FALSE "${folder} has the absolute path ${place}")
      endif()
    endforeach()
  endif()
endforeach()

# Each feature brings its component and headers, and no other component does.
foreach(component cpu io format cuda)
  set(has FALSE)
  if(EXISTS "${PACKAGES_DIR}/share/kvpolicy/kvpolicy-${component}-targets.cmake" AND
     EXISTS "${PACKAGES_DIR}/include/kvpolicy/${component}")
    set(has TRUE)
  endif()
  if(component IN_LIST FEATURES)
    expect(${has} "feature ${component} is on, but its component is missing")
  elseif(has)
    expect(FALSE "feature ${component} is off, but its component is there")
  endif()
endforeach()

file(STRINGS "${PACKAGES_DIR}/include/kvpolicy/version.hpp" lines
     REGEX "^#define KVPOLICY_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
list(TRANSFORM lines REPLACE "^.* " "")
list(JOIN lines "." version)
if(NOT VERSION STREQUAL version)
  expect(FALSE "vcpkg.json has version ${VERSION}, version.hpp ${version}")
endif()
message(STATUS "port kvpolicy ${VERSION} with features: ${FEATURES}")
