# SPDX-License-Identifier: Apache-2.0
#
# Install rules: the headers, the CMake package and the .pc files. All but kvpolicy::compiled is
# header-only, so it is installed under include/ and share/ and serves every architecture.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(config_dir "${CMAKE_INSTALL_DATADIR}/cmake/kvpolicy")
set(pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

foreach(component IN LISTS KVPOLICY_COMPONENTS)
  set(target kvpolicy_${component})
  if(component STREQUAL kvpolicy)
    set(target kvpolicy)
  endif()
  if(TARGET ${target})
    install(TARGETS ${target} EXPORT kvpolicy-${component}
            INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"  # for CMake before 3.23
            FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(EXPORT kvpolicy-${component} NAMESPACE kvpolicy:: DESTINATION "${config_dir}"
            FILE kvpolicy-${component}-targets.cmake)
  endif()
endforeach()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/kvpolicyConfig.cmake.in" kvpolicyConfig.cmake
  INSTALL_DESTINATION "${config_dir}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor release may break its users.
write_basic_package_version_file(kvpolicyConfigVersion.cmake COMPATIBILITY SameMinorVersion
                                 ARCH_INDEPENDENT)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvpolicyConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/kvpolicyConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/KvpolicyFindHighway.cmake"
        DESTINATION "${config_dir}")

# Paths are relative to the .pc file, so that an installed tree may be moved; they are absolute only if
# the include folder is.
if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(KVPOLICY_PC_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH to_prefix "/prefix/${pkgconfig_dir}" "/prefix")
  string(REGEX REPLACE "/$" "" to_prefix "${to_prefix}")
  set(KVPOLICY_PC_INCLUDEDIR "\${pcfiledir}/${to_prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
# kvpolicy_install_pc(<name> <description> <requires>): installs one .pc file.
function(kvpolicy_install_pc name description requires)
  set(PC_NAME "${name}")
  set(PC_DESCRIPTION "${description}")
  set(PC_REQUIRES "")
  if(requires)
    set(PC_REQUIRES "Requires: ${requires}\n")
  endif()
  configure_file("${PROJECT_SOURCE_DIR}/cmake/kvpolicy.pc.in" ${name}.pc @ONLY)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}.pc" DESTINATION "${pkgconfig_dir}")
endfunction()
kvpolicy_install_pc(kvpolicy "${PROJECT_DESCRIPTION}" "")
set(own "kvpolicy = ${PROJECT_VERSION}")
if(TARGET kvpolicy_io)
  kvpolicy_install_pc(kvpolicy-io "kvpolicy's plan, pattern and score files"
                      "${own}, nlohmann_json >= 3.10")
endif()
if(TARGET kvpolicy_cpu)
  kvpolicy_install_pc(kvpolicy-cpu "kvpolicy's engine for CPUs" "${own}, libhwy")
endif()
if(TARGET kvpolicy_format)
  kvpolicy_install_pc(kvpolicy-format "kvpolicy's values as text" "${own}, fmt >= 9")
endif()
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
