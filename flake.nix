# SPDX-License-Identifier: MIT
#
# TokenSpeed under Nix: the pinned CUDA toolchain, shells to develop and to run CI in, both programs and both images.
# Bazel stays the build of record (MODULE.bazel). Here the native parts are compiled by tools/build_native.sh, which
# needs no network, and the Python packages are those of nixpkgs. tools/nix/check.sh evaluates all of it against a
# stub of nixpkgs in which an attribute or an argument that does not exist is an error.
{
  description = "TokenSpeed: an inference engine and gateway for agents";

  # A release of the 26.05 channel; flake.lock holds its hash. Its cudaPackages_13 is CUDA 13.
  inputs.nixpkgs.url = "https://releases.nixos.org/nixos/26.05/nixos-26.05.9592.21a67dc47014/nixexprs.tar.xz";

  outputs = { self, nixpkgs }:
    let
      # The CPU kernels have vector code for x86-64 only.
      systems = [ "x86_64-linux" ];

      forEachSystem = f: nixpkgs.lib.genAttrs systems (system: f (import nixpkgs {
        inherit system;
        config.allowUnfree = true; # the CUDA toolkit
      }));

      cudaOf = pkgs: pkgs.cudaPackages_13;

      gatewayPackages = ps: [
        ps.aiohttp
        ps.gguf
        ps.grpcio
        ps.huggingface-hub
        ps.jinja2
        ps.msgspec
        ps.prometheus-client
        ps.protobuf
        ps.psutil
        ps.pyyaml
        ps.pyzmq
        ps.tokenizers
      ];
      enginePackages = ps: gatewayPackages ps ++ [
        ps.grpcio-health-checking
        ps.grpcio-reflection
        ps.numpy
        ps.safetensors
        ps.torch
        ps.triton
      ];
      testPackages = ps: enginePackages ps ++ [
        ps.grpcio-tools
        ps.hypothesis
        ps.mypy
        ps.openai
        ps.pybind11
        ps.pytest
        ps.ruff
        ps.transformers
      ];
      pythonOf = pkgs: pkgs.python312;

      # The CUDA compiler and what it includes.
      cudaTools = pkgs: [ (cudaOf pkgs).cuda_nvcc (cudaOf pkgs).cuda_cudart (cudaOf pkgs).cuda_cccl ];

      ciTools = pkgs: [
        pkgs.bazelisk
        pkgs.buildifier
        pkgs.clang-tools
        pkgs.git
        pkgs.runc
        pkgs.skopeo
        pkgs.umoci
        ((pythonOf pkgs).withPackages testPackages)
      ] ++ cudaTools pkgs;

      # Sources with the native parts built, laid out as an import root.
      libraryOf = pkgs: (cudaOf pkgs).backendStdenv.mkDerivation {
        pname = "tokenspeed-lib";
        version = self.shortRev or "dirty";
        src = self;
        nativeBuildInputs = [
          ((pythonOf pkgs).withPackages (ps: [ ps.grpcio-tools ps.pybind11 ]))
        ] ++ cudaTools pkgs;
        dontConfigure = true;
        buildPhase = ''
          JOBS=$NIX_BUILD_CORES bash tools/build_native.sh cc cpu cuda
          python3 tools/build_defs/gen_grpc.py --proto-root protos/tokenspeed/grpc --package tokenspeed_protos --out build
        '';
        installPhase = ''
          mkdir -p $out/lib
          cp -r python/tokenspeed kernels/tokenspeed_kernel build/tokenspeed_protos $out/lib/
          cp cc/bindings/tokenspeed_cc.so $out/lib/
          find $out/lib -name '*_test.py' -delete
        '';
      };

      # A command that runs one Python module of the library.
      commandOf = pkgs: { name, module, packages }: pkgs.writeShellApplication {
        inherit name;
        runtimeInputs = [ ((pythonOf pkgs).withPackages packages) ];
        runtimeEnv.PYTHONPATH = "${libraryOf pkgs}/lib";
        text = ''exec python3 -m ${module} "$@"'';
      };

      imageOf = pkgs: { name, command, arguments }: pkgs.dockerTools.buildLayeredImage {
        inherit name;
        tag = self.shortRev or "dirty";
        contents = [ command pkgs.cacert ];
        config = {
          Entrypoint = [ "${command}/bin/${command.name}" ];
          Cmd = arguments;
          ExposedPorts."8000/tcp" = { };
          User = "65532:65532";
          Env = [ "HOME=/tmp" "SSL_CERT_FILE=${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt" ];
        };
      };
    in
    {
      devShells = forEachSystem (pkgs: {
        default = pkgs.mkShell {
          packages = ciTools pkgs ++ [ pkgs.gdb pkgs.ninja ];
          env.CUDA_HOME = "${(cudaOf pkgs).cuda_nvcc}";
          shellHook = ''
            export PYTHONPATH=$PWD/python:$PWD/kernels:$PWD/cc/bindings:$PWD/protos
            echo "TokenSpeed: tools/bazel test //... | tools/build_native.sh | tools/lint/run.sh"
          '';
        };
        ci = pkgs.mkShell {
          packages = ciTools pkgs;
          env.CUDA_HOME = "${(cudaOf pkgs).cuda_nvcc}";
        };
      });

      packages = forEachSystem (pkgs: rec {
        engine = commandOf pkgs { name = "ts"; module = "tokenspeed.cli.ts"; packages = enginePackages; };
        gateway = commandOf pkgs { name = "smg"; module = "tokenspeed.cli.smg"; packages = gatewayPackages; };
        engine-image = imageOf pkgs {
          name = "tokenspeed-engine";
          command = engine;
          arguments = [ "serve" "--host" "0.0.0.0" ];
        };
        gateway-image = imageOf pkgs {
          name = "tokenspeed-gateway";
          command = gateway;
          arguments = [ "launch" "--host" "0.0.0.0" ];
        };
        default = engine;
      });

      checks = forEachSystem (pkgs: {
        inherit (self.packages.${pkgs.system}) engine gateway engine-image gateway-image;
      });
    };
}
