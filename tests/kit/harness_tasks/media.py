"""What the tasks of this folder read from a row of the data kit."""

from pathlib import Path

from PIL import Image


def visuals(doc):
    return [Image.open(Path(name)) for name in doc["images"]]


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def target(doc):
    return doc["answer"]


def choices(doc):
    return ["0 pictures.", "1 pictures.", "2 pictures."]


def index(doc):
    return int(doc["answer"][0]) % 3


def results(doc, answers):
    return {"exact": float(answers[0] == doc["answer"])}
