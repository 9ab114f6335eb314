# SPDX-License-Identifier: MIT
#
# Stands in for nixpkgs where it cannot be downloaded, so that flake.nix can be evaluated to the last derivation.
# It has only the attributes that the flake may use, and its functions know their arguments: a misspelt name, an
# unknown or missing argument, or a value of the wrong type ends the evaluation with a message that names it.
{ system ? builtins.currentSystem, config ? { }, overlays ? [ ] }:
let
  inherit (builtins) attrNames concatStringsSep elem filter hasAttr head isList isString toJSON;

  derive = name: attrs: derivation ({
    inherit name system;
    builder = "/bin/sh";
    args = [ "-c" "echo ${name} > $out" ];
  } // attrs);
  package = name: derive name { };
  packagesNamed = names: builtins.listToAttrs (map (name: { inherit name; value = package name; }) names);

  # Checks a call: known arguments only, the required ones present, each that is typed of its type.
  call = function: { required, optional ? [ ], types ? { } }: args:
    let
      known = required ++ optional;
      unknown = filter (name: !(elem name known)) (attrNames args);
      missing = filter (name: !(hasAttr name args)) required;
      wrong = filter (name: hasAttr name types && !(types.${name} args.${name})) (attrNames args);
    in
    if unknown != [ ] then throw "${function}: unknown argument ${head unknown}"
    else if missing != [ ] then throw "${function}: missing argument ${head missing}"
    else if wrong != [ ] then throw "${function}: wrong type of argument ${head wrong}"
    else args;

  # Forces every dependency, so that a bad one is found.
  joined = packages: concatStringsSep " " (map (p: "${p}") packages);

  unfree = value: if config.allowUnfree or false then value else throw "an unfree package needs config.allowUnfree";

  pythonPackages = packagesNamed [
    "aiohttp" "gguf" "grpcio" "grpcio-health-checking" "grpcio-reflection" "grpcio-tools" "huggingface-hub" "hypothesis"
    "jinja2" "msgspec" "mypy" "numpy" "openai" "prometheus-client" "protobuf" "psutil" "pybind11" "pytest" "pyyaml" "pyzmq" "ruff" "safetensors" "tokenizers"
    "torch" "transformers" "triton"
  ];

  mkDerivation = args:
    let
      checked = call "mkDerivation" {
        required = [ "pname" "version" "src" ];
        optional = [ "nativeBuildInputs" "buildInputs" "dontConfigure" "buildPhase" "installPhase" "checkPhase" "meta" ];
        types = { pname = isString; version = isString; nativeBuildInputs = isList; buildPhase = isString; installPhase = isString; };
      } args;
    in
    derive "${checked.pname}-${checked.version}" {
      inputs = joined (checked.nativeBuildInputs or [ ] ++ checked.buildInputs or [ ]);
      phases = (checked.buildPhase or "") + (checked.installPhase or "");
    };
in
packagesNamed [
  "bazelisk" "buildifier" "cacert" "clang-tools" "gdb" "git" "ninja" "runc" "skopeo" "umoci"
] // {
  inherit system;
  lib = import ./lib.nix;

  python312 = package "python3-3.12" // {
    withPackages = choose: derive "python3-3.12-env" { inputs = joined (choose pythonPackages); };
  };

  cudaPackages_13 = unfree (packagesNamed [ "cuda_nvcc" "cuda_cudart" "cuda_cccl" ] // {
    backendStdenv = { inherit mkDerivation; };
  });

  mkShell = args:
    let
      checked = call "mkShell" {
        required = [ "packages" ];
        optional = [ "name" "inputsFrom" "shellHook" "env" ];
        types = { packages = isList; shellHook = isString; };
      } args;
    in
    derive "nix-shell" {
      inputs = joined checked.packages;
      hook = checked.shellHook or "";
      environment = toJSON (checked.env or { });
    };

  writeShellApplication = args:
    let
      checked = call "writeShellApplication" {
        required = [ "name" "text" ];
        optional = [ "runtimeInputs" "runtimeEnv" "checkPhase" "excludeShellChecks" "meta" ];
        types = { name = isString; text = isString; runtimeInputs = isList; };
      } args;
    in
    derive checked.name {
      inherit (checked) text;
      inputs = joined (checked.runtimeInputs or [ ]);
      environment = toJSON (checked.runtimeEnv or { });
    };

  dockerTools.buildLayeredImage = args:
    let
      checked = call "buildLayeredImage" {
        required = [ "name" ];
        optional = [ "tag" "contents" "config" "created" "maxLayers" "fromImage" "extraCommands" "fakeRootCommands" ];
        types = { name = isString; tag = isString; contents = isList; };
      } args;
      # The keys of an image configuration, from the OCI image specification.
      settings = call "buildLayeredImage config" {
        required = [ ];
        optional = [ "Cmd" "Entrypoint" "Env" "ExposedPorts" "Labels" "StopSignal" "User" "Volumes" "WorkingDir" ];
        types = { Cmd = isList; Entrypoint = isList; Env = isList; User = isString; };
      } (checked.config or { });
    in
    derive "${checked.name}.tar.gz" { settings = toJSON settings; inputs = joined (checked.contents or [ ]); };
}
