"""The tool of the programs whose library wants its schema written out."""

NAME = "get_weather"
DESCRIPTION = "How the weather is in a city"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Basel", "Chur"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
