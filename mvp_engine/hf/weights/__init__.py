"""Weights from and to Hugging Face folders and the Hub: load, export, merge, and streams of full tensors."""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "export": "ExportPlan FolderView Target WholeFolder check_folder drop_local_settings export",
    "hub": (
        "ADAPTER_CONFIG HubRepo SCHEME base_of_adapter dataset_files folder_files hub_dataset "
        "fetch_weights hub_errors hub_model local_folder model_folder pin_config repo_of"
    ),
    "load": "Entries FolderParameter NewRows SINGLE WeightFiles fingerprint folder_groups load",
    "merge": "check_base check_new_tokens merge read_model_info write_model_info",
    "pretrained": "Delta Deltas TensorEntries WeightReceiver first_names load_pretrained",
}
