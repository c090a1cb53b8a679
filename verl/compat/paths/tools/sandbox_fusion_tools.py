"""The tool that runs code at a Sandbox Fusion service, under upstream's path."""

from verl.tools.sandbox_fusion import SandboxFusionTool
